//! The services with small messages, through tonic: Handshake, health, and reflection where it is asked for.

use crate::config::ServerConfig;
use crate::proto::inter_deployment_service_server::{InterDeploymentService, InterDeploymentServiceServer};
use crate::proto::{CallRequest, CallResponse, HandshakeRequest, HandshakeResponse};
use crate::server::stream::SharedMemoryAgreed;
use crate::service::SHM;
use crate::wire::FrameBuf;
use bytes::{Buf, Bytes};
use h2::RecvStream;
use h2::server::SendResponse;
use http_body::{Body, Frame};
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tonic::codegen::Service;
use tonic::server::NamedService;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};

pub struct Services {
    handshake: InterDeploymentServiceServer<Greeter>,
    health: HealthServer<HealthService>,
    /// v1 and v1alpha; which of them a client speaks differs.
    reflection: Vec<Reflection>,
}

/// Its path, and what answers there: the type of the service has no name.
type Reflection = (String, Box<dyn Fn(http::Request<H2Body>) -> Answering + Send + Sync>);
type Answering = Pin<Box<dyn Future<Output = http::Response<tonic::body::Body>> + Send>>;

/// What the port serves, as `FileDescriptorSet`. Ray's own service on it is Ray's to describe.
const DESCRIPTORS: [&[u8]; 2] =
    [include_bytes!("../proto/ray_serve_grpc.v1.descriptors"), tonic_health::pb::FILE_DESCRIPTOR_SET];

fn reflection() -> Vec<Reflection> {
    fn answers<S>(name: &str, service: S) -> Reflection
    where
        S: Service<http::Request<H2Body>, Response = http::Response<tonic::body::Body>, Error = Infallible>,
        S: Clone + Send + Sync + 'static,
        S::Future: Send,
    {
        let answer = move |request| -> Answering {
            let mut service = service.clone();
            Box::pin(async move {
                let Ok(response) = service.call(request).await;
                response
            })
        };
        (format!("/{name}/"), Box::new(answer))
    }
    let builder = || {
        let builder = tonic_reflection::server::Builder::configure();
        DESCRIPTORS.into_iter().fold(builder, tonic_reflection::server::Builder::register_encoded_file_descriptor_set)
    };
    let v1 = builder().build_v1().map(|service| answers("grpc.reflection.v1.ServerReflection", service));
    let alpha = builder().build_v1alpha().map(|service| answers("grpc.reflection.v1alpha.ServerReflection", service));
    v1.into_iter().chain(alpha).collect()
}

impl Services {
    pub fn new(config: &ServerConfig) -> Self {
        let greeter = Greeter {
            answer: HandshakeResponse {
                version: config.version.clone(),
                capabilities: Vec::new(),
                identity: config.identity.clone(),
                max_message_size: config.max_message_size as u64,
            },
        };
        let health = HealthServer::new(HealthService::from_health_reporter(HealthReporter::new()));
        let reflection = if config.reflection { reflection() } else { Vec::new() };
        Services { handshake: InterDeploymentServiceServer::new(greeter), health, reflection }
    }

    pub async fn serve(&self, request: http::Request<RecvStream>, mut respond: SendResponse<FrameBuf>) {
        let health = format!("/{}/", <HealthServer<HealthService> as NamedService>::NAME);
        let request = request.map(H2Body);
        let response = tokio::select! {
            _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
            response = async {
                let path = request.uri().path();
                if path.starts_with(&health) {
                    self.health.clone().call(request).await
                } else if let Some((_, answer)) = self.reflection.iter().find(|(name, _)| path.starts_with(name)) {
                    Ok(answer(request).await)
                } else {
                    // Answers UNIMPLEMENTED to what it does not know.
                    self.handshake.clone().call(request).await
                }
            } => response,
        };
        let Ok(response) = response;
        // The peer going away in between is no news.
        let _ = send(response, respond).await;
    }
}

#[derive(Clone)]
struct Greeter {
    answer: HandshakeResponse,
}

/// The data methods never come here: they bypass tonic's codec.
fn bypassed() -> Status {
    Status::internal("data methods are served below tonic")
}

#[tonic::async_trait]
impl InterDeploymentService for Greeter {
    async fn handshake(&self, request: Request<HandshakeRequest>) -> Result<Response<HandshakeResponse>, Status> {
        let mut answer = self.answer.clone();
        if request.extensions().get::<SharedMemoryAgreed>().is_some() {
            answer.capabilities.push(SHM.to_owned());
        }
        Ok(Response::new(answer))
    }

    async fn handle_request(&self, _: Request<CallRequest>) -> Result<Response<CallResponse>, Status> {
        Err(bypassed())
    }

    type HandleRequestStreamingStream = tonic::codegen::BoxStream<CallResponse>;

    async fn handle_request_streaming(
        &self,
        _: Request<CallRequest>,
    ) -> Result<Response<Self::HandleRequestStreamingStream>, Status> {
        Err(bypassed())
    }

    async fn handle_request_with_rejection(&self, _: Request<CallRequest>) -> Result<Response<CallResponse>, Status> {
        Err(bypassed())
    }

    type HandleRequestWithRejectionStreamingStream = tonic::codegen::BoxStream<CallResponse>;

    async fn handle_request_with_rejection_streaming(
        &self,
        _: Request<CallRequest>,
    ) -> Result<Response<Self::HandleRequestWithRejectionStreamingStream>, Status> {
        Err(bypassed())
    }
}

/// A request's body as tonic reads bodies.
struct H2Body(RecvStream);

impl Body for H2Body {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if let Some(data) = ready!(self.0.poll_data(cx)) {
            let data = data?;
            let _ = self.0.flow_control().release_capacity(data.len());
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let trailers = ready!(self.0.poll_trailers(cx))?;
        Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}

async fn send(
    response: http::Response<tonic::body::Body>,
    mut respond: SendResponse<FrameBuf>,
) -> Result<(), h2::Error> {
    let (head, body) = response.into_parts();
    let mut body = std::pin::pin!(body);
    let mut stream = respond.send_response(http::Response::from_parts(head, ()), body.is_end_stream())?;
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        let Ok(frame) = frame else { break };
        match frame.into_data() {
            Ok(mut data) => stream.send_data(FrameBuf::from(data.copy_to_bytes(data.remaining())), false)?,
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    return stream.send_trailers(trailers);
                }
            }
        }
    }
    stream.send_data(FrameBuf::default(), true)
}
